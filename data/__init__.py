"""Turn rows from files, hub datasets and built-in tasks into token ids, masks and micro-batches."""

import strop_names

strop_names.take()
