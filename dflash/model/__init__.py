"""What a checkpoint ships, and nothing else: read the files in this order.

1. `configuration_dflash`: what a drafter is.
2. `attention_dflash`: which positions attend to which.
3. `cache_dflash`: keys, values and running states, rolled back after rejected tokens.
4. `proposals_dflash`: sequences, draft trees, lookup, and how many tokens to propose.
5. `verification_dflash`: which proposals are accepted, and why the text is the target's.
6. `step_dflash`: the target's and the drafter's forward, eager or compiled.
7. `modeling_dflash`: the network.
8. `decoding_dflash`: the loop: propose, verify, accept, commit.
9. `generation_dflash`: what `spec_generate` takes, checks and returns.
"""

from dflash.checkpoints import dialects

from .configuration_dflash import DFlashConfig


DFlashConfig.reader = dialects  # a shipped copy has no package around it, and reads the form that it was saved in
