"""How CTAs of different ranks wait for one another: signals, LL words, Lamport slots, credits, inter-node puts."""
