"""Tasks that learn on a laptop: model, tokenizer, data and reward, made from a seed."""
