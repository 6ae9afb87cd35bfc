"""Programs that torchrun runs, once for every rank."""
