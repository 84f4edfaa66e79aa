"""Communicators that are replaced under live handles (DESIGN 6). Import `deadpool.communicator.groups`."""
