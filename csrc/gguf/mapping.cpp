#include "gguf/mapping.h"
