#include "ringlm/sampler.h"
