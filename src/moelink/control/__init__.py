"""The control plane: ranks meet, agree, detect failures and recover. It runs on the host and moves no token.

====================  ==================================================================================================
``group``             find the peers: torchrun's variables or a ProcessGroup, then a store and groups of moelink's own
``meeting``           let the ranks of a group meet in a store, at ``init`` and in a recovery
``roster``            the entries of ranks there, and the list of all
``stores``            open a store, and use it without waiting in it
``handshake``         compare configurations and exchange addresses, once, at ``init``
``exchange``          exchange tensors over a caller's group with a deadline; ``values``: small values, as JSON
``probe``             ask each rank for its progress, and report failures to it
``responder``         the process beside each rank that answers
``failure_detector``  name the rank at fault when a call fails, and report it to the peers
``recovery``          let the surviving ranks agree on a new, smaller group
``error_record``      read the errors that kernels report; ``mismatch``: describe a mismatched call
``process``           files, threads and tensors of one process
====================  ==================================================================================================
"""
