"""Engines and what workflows see of them.

Invariant: importing this package, or any module in it except the vLLM worker's, imports
neither torch nor transformers nor vllm; they are imported by the functions that need them.
"""
