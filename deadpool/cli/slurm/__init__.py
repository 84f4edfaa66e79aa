"""DeadPool inside a Slurm allocation: what the job template in `slurm/` calls.

    prepare   on the batch host: checks the allocation, writes the run folder, prints its path
    host      on every node: a member of etcd if this node has one, and the node's agent
    wait      on the batch host: until all hosts have ended; submits the job again after a warning signal
    grow      by the leader's agent, or by hand: one more node for the running job

What they must all know is one file of the run folder, `job.py`.
"""
