"""What a checkpoint ships, and nothing else: read the files in this order.

These decide the text. A reader who only asks whether it is the target's may stop after them.

1. `attention_dflash`: which positions attend to which.
2. `cache_dflash`: keys, values and running states, rolled back after rejected tokens.
3. `targets_dflash`: what a target is, and its forward.
4. `sequences_dflash`: a text, and where it stops.
5. `sampling_dflash`: which token the target draws at a position.
6. `acceptance_dflash`: which proposals are accepted, and why the text is the target's.
7. `drafting_dflash`: what the drafter reads and proposes.
8. `decoding_dflash`: the loop: propose, verify, accept, commit.

These say what a drafter is, and what may be asked for.

9. `configuration_dflash`: what a drafter is.
10. `heads_dflash`: how proposals depend on each other.
11. `layers_dflash`: the layers of the network.
12. `modeling_dflash`: the network.
13. `requests_dflash`: what may be asked for, and what is refused.
14. `generation_dflash`: what `spec_generate` takes and returns.

A pair's folder ships one more.

15. `pair_dflash`: the door of a target that drafts by itself.
"""
