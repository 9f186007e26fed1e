"""Files on disk: atomic folders, and safetensors files read in slices."""
