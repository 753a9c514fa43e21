"""From prompts to text: requests, the scheduler, the runner, the engine; import the module you need (the scheduler needs no torch)."""
