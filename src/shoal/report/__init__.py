"""Tables, plots and the HTML page of a run, from its record alone."""
