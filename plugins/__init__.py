"""Adaptors for frameworks that own the training loop or wrap the state in their own classes.

An adaptor is a thin module: it says which buffers make up the state, which of them are unique to a rank, and
what must be reset after an aborted collective. See README.md in this folder.
"""
