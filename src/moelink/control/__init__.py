"""The control plane: how ranks meet, agree, notice failures and recover. Host side, never on the way of a token."""
