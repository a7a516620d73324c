"""The Mixture of Attentions drafter in PyTorch (arXiv 2410.03804): model, checkpoints, training."""
