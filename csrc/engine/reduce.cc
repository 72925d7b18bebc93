#include "engine/reduce.h"
