"""`python -m deadpool.runtime.agent_main`: the agent process of one host, started by a launcher of ours."""

import hashlib

from deadpool.outlet import end_process
from deadpool.runtime.agent_process import run_agent
from deadpool.runtime.launch import agent_handover

if __name__ == "__main__":
    config, run_dir, host, token = agent_handover()
    # Equal on all hosts of a launch; not the token itself, as the events that carry it may be read by others.
    run_id = hashlib.sha256(token.encode()).hexdigest()[:16]
    end_process(run_agent(config, run_dir, host, token, run_id=run_id))
