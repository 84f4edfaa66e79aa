"""torchrun with the rendezvous of lm-resiliency registered by hand.

The entry point of the 0.2.0 wheel names create_rendezvous_handler(params), torch 2.13 wants a getter without
arguments, so --rdzv-backend=lm_resiliency is "not registered".
"""

from lm_resiliency.integrations.torchrun import create_rendezvous_handler
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main

rendezvous_handler_registry.register("lm_resiliency", create_rendezvous_handler)
main()
