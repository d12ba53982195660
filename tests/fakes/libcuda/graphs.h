/* What captures make and executables are made of. */
#ifndef FAKE_GRAPHS_H
#define FAKE_GRAPHS_H

#include "fake.h"

typedef struct Node {
    Object object;
    Op op;
    Frontier after;
    unsigned followers;
    struct Node *next;
} Node;

typedef struct Graph {
    Object object;
    Node *first, **last;
    unsigned count;
} Graph;

typedef struct Capture {
    Object object;
    Stream *origin;
    CUstreamCaptureMode mode;
    pthread_t thread;
    bool broken;
    Graph *graph;
    struct Capture *next; /* under way too */
} Capture;

#endif
