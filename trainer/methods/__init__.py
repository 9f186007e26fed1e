"""One file per training method; each has a Config and train()."""
