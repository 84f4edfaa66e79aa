"""The pure core: every decision of DeadPool, and nothing that touches the world.

Allowed here: this package and the side-effect-free part of the standard library. Not allowed: clocks,
randomness, files, sockets, threads, logging. Time comes in as `now_s` inside an event.
"""
