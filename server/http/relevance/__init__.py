"""The routes that compare texts and generate none: embeddings, scores, rankings. Start with embeddings.py."""
