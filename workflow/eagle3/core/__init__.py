"""What every stage stands on: errors, files, parameters, the frame of a stage."""
