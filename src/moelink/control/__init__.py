"""The control plane: ranks meet, agree, detect failures and recover. It runs on the host and moves no token.

====================  ==================================================================================================
``group``             find the peers: torchrun's variables or a ProcessGroup, then a store and groups of moelink's own
``meeting``           let the ranks of a group meet in a store, at ``init``, once or again
``roster``            what each rank shows of itself there, and the list of all of them
``stores``            open a store, and use it without waiting in it
``handshake``         compare configurations and exchange addresses, once, at ``init``
``probe``             ask each rank "how far are you", and report failures to it
``responder``         the process beside each rank that answers
``failure_detector``  name the rank at fault when a call fails, and report it to the peers
``surroundings``      clock, probe servers and store, injected into a recovery
``recovery``          let the surviving ranks agree on a new, smaller group
====================  ==================================================================================================
"""
