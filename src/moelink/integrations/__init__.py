"""moelink in other libraries: one package for each, which nothing else in moelink imports."""
