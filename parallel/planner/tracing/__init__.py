"""From a module to the operations that it runs, by the compiler's graph or eagerly."""
