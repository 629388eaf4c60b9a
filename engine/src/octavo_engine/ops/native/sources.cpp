// The version of the sources that this library was compiled from, so that a prebuilt library of another is not used.

extern "C" const char* octavo_sources() { return OCTAVO_SOURCES; }
