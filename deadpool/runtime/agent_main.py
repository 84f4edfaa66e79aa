"""`python -m deadpool.runtime.agent_main`: the agent process of one host of a standalone run."""

import sys

from deadpool.runtime.agent_process import run_agent
from deadpool.runtime.launch import agent_handover

if __name__ == "__main__":
    config, run_dir, host, token = agent_handover()
    sys.exit(run_agent(config, run_dir, host, token, run_id=token))
