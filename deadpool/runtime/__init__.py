"""Runtime: the agent of a host, the worker session of a rank, and the messages between them."""
