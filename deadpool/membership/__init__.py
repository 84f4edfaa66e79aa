"""Agree: who is a member, who leads, and which View holds. etcd behind a small interface; gRPC only here."""
