"""What a step costs on one GPU; `gpu.py` beside this folder runs it."""
