"""templates: kernels of regions that are more than rows by themselves. A folder each: form, text, launch."""
