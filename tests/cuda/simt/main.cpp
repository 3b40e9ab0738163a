// Apart from the tests: doctest's own code must not be compiled with -fsanitize=thread (races.cpp).
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
