"""Library behind the stages of Eaglemake: one module owns one thing."""
