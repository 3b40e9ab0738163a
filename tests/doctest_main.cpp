// doctest itself, compiled once: without -O, and never with -fsanitize=thread (cuda/simt/races.cpp).
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
