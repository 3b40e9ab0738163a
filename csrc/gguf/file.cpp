#include "gguf/file.h"
