#define SNAPMLA_IMPLEMENTATION
#include "../../snapmla.cuh"
