"""Planning an export: all inputs gathered, what is written decided, every output byte placed."""
