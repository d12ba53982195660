#include "fake.h"
void kernel_run(const Op *op) { (void)op; }
void memory_run(const Op *op) { (void)op; }
CUresult capture_add(Call *call, Stream *stream, Op *op) { (void)call; (void)stream; (void)op; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_record(Call *call, Stream *stream, Event *event, unsigned flags) { (void)call; (void)stream; (void)event; (void)flags; return CUDA_ERROR_NOT_SUPPORTED; }
CUresult capture_wait(Call *call, Stream *stream, Event *event, unsigned flags) { (void)call; (void)stream; (void)event; (void)flags; return CUDA_ERROR_NOT_SUPPORTED; }
void capture_break(struct Capture *capture) { (void)capture; }
