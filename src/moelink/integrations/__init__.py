"""moelink inside other people's libraries: one package for each, imported by those who use it and by nothing else."""
