#include "gguf/types.h"
