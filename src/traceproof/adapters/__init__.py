"""Adapters: how a ground truth's call serves a definition; `adapters/<stack>/<op_type>.py`, one tuple each."""
