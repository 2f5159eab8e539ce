"""What a checkpoint ships, and nothing else: read the files in this order.

1. `configuration_dflash`: what a drafter is.
2. `attention_dflash`: which positions attend to which.
3. `heads_dflash`: heads that choose a block's tokens one after another.
4. `modeling_dflash`: the network.
5. `cache_dflash`: keys, values and running states, rolled back after rejected tokens.
6. `proposals_dflash`: sequences, draft trees, lookup, and how many tokens to propose.
7. `verification_dflash`: which proposals are accepted, and why the text is the target's.
8. `step_dflash`: the target's and the drafter's forward, eager or compiled.
9. `decoding_dflash`: the loop: propose, verify, accept, commit.
10. `generation_dflash`: what `spec_generate` takes, checks and returns.
"""

from dflash.checkpoints import dialects

from .configuration_dflash import DFlashConfig


DFlashConfig.reader = dialects  # a shipped copy has no package around it, and reads the form that it was saved in
