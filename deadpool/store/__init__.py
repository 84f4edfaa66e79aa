"""The host memory store: segments, replicas on other hosts, fetches, the checkpoint tier. No torch here.

    checksum      chunk size and digests
    segment       one rank's memory: a sealed memfd with two banks
    host_memory   all segments of a host, and who reads or writes which bank
    transport     the interface that moves copies between hosts, and its values
    in_process    it, within one process
    tcp           it, over TCP; with tcp_connection and wire
    data_server   what a host does with streams and fetches that arrive
    replication   what an agent does to have its ranks' snapshots held elsewhere
    fetch         how a joining host gets its ranks' state
    checkpoint    snapshots on durable storage, the last resort
    memory_check  is there room for all this on this host

Nothing here decides which step is captured, committed or restored: `deadpool.core` does.
"""
