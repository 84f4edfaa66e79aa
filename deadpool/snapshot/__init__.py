"""Capture and restore of one rank's training state: what is copied, where to, and how it comes back.

Lives here: which tensors and objects make up the state, their layout in a bank, the background copy,
the small blob, the restore in place, and what DDP and FSDP2 need after an abort. Does not live here:
who holds which copy, sockets, processes, and communicators.
"""
