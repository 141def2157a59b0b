"""From what the user asks for to an applied plan. Knows nothing of Llama, works on any module that publishes
its units."""
