"""Files on disk: atomic folders, and safetensors files read slice by slice."""
