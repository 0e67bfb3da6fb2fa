/* impl.cu - the one implementation of snapmla.cuh that the tests are linked with. */
#define SNAPMLA_IMPLEMENTATION
#include "snapmla.cuh"
