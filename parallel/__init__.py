"""Make a parallelization plan from a config and apply it. Independent of Llama: works on any model that
declares its FSDP units."""
