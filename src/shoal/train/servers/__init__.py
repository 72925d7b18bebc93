"""Updates in which servers step, or in which workers step by themselves between exchanges through servers."""
