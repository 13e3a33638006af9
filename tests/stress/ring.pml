/* The ring of zapex/shm_ring.py: every order of steps, a crash at every step, records of two halves.
 *
 * spin -a ring.pml && cc -DSAFETY -o pan pan.c && ./pan          no errors
 * A barrier is program order kept. With it taken away (-D NO_...) what it kept apart may be seen in
 * either order, and the check must fail: tests/stress/test_models.py.
 */
#define CAPACITY 2
#define RECORDS 4      /* sequences 0 .. RECORDS - 1; the record of a sequence holds sequence + 1 */
#define CRASHES 2      /* of each end */

byte tail, head;       /* I3: one writer each */
byte low[CAPACITY], high[CAPACITY];

#define SLOT(sequence) ((sequence) % CAPACITY)
#define I1 assert(head <= tail && tail - head <= CAPACITY)
#define CRASH_POINT if :: crashes < CRASHES -> crashes++; goto attach :: true fi

inline write(first, n) {
    i = 0;
    do
    :: i < n ->
        low[SLOT(first + i)] = first + i + 1;
        CRASH_POINT;
        high[SLOT(first + i)] = first + i + 1;
        CRASH_POINT;
        i++
    :: else -> break
    od
}

inline commit(n) { tail = tail + n; I1 }

proctype Producer() {
    byte seen, n, i, crashes;
attach:
    seen = head;
    do
    :: tail == RECORDS -> break
    :: tail < RECORDS ->
        if
        :: n = 1
        :: tail + 2 <= RECORDS -> n = 2
        fi;
#ifdef NO_ACQUIRE_HEAD         /* the write may be done before the head is loaded */
        if :: write(tail, n) :: true fi;
#endif
        if
        :: tail + n - seen > CAPACITY ->
            seen = head;       /* SYNC slot-free */
#ifndef NO_FULL_CHECK
            if
            :: tail + n - seen > CAPACITY -> head != seen; goto attach   /* FULL: tries again */
            :: else
            fi
#endif
        :: else
        fi;
        CRASH_POINT;
#ifdef NO_RELEASE_TAIL         /* the tail may be seen before the record */
        if
        :: commit(n); write(tail - n, n)
        :: write(tail, n); commit(n)
        fi;
#else
        write(tail, n);
        commit(n);             /* SYNC slot-full */
#endif
        CRASH_POINT
    od
}

inline read(sequence) {
    a = low[SLOT(sequence)];
    b = high[SLOT(sequence)]
}

/* Whole, and the record of its sequence: not torn, lost, doubled or of another lap. */
inline check(sequence) { assert(a == sequence + 1 && b == sequence + 1) }

proctype Consumer() {
    byte seen, n, i, a, b, crashes;
    bool ahead;
attach:
    seen = tail;
    do
    :: head == RECORDS -> break
    :: head < RECORDS ->
        ahead = false;
#ifdef NO_ACQUIRE_TAIL         /* the record may be read before the tail is loaded */
        if :: read(head); ahead = true :: true fi;
#endif
        if
        :: seen - head < 2 -> seen = tail    /* SYNC slot-full */
        :: else
        fi;
        CRASH_POINT;
        n = seen - head;
        if
        :: n == 0 -> tail != seen; goto attach      /* empty: tries again */
        :: n >= 1 -> n = 1
        :: n >= 2 -> n = 2
        fi;
#ifdef NO_RELEASE_HEAD         /* the head may be seen before the record is read */
        if :: head = head + n; I1; read(head - n); check(head - n); goto attach :: true fi;
#endif
        i = 0;
        do
        :: i < n ->
            if :: ahead && i == 0 :: else -> read(head + i) fi;
            check(head + i);
            CRASH_POINT;
            i++
        :: else -> break
        od;
        head = head + n;       /* SYNC slot-free */
        I1;
        CRASH_POINT
    od
}

init { atomic { run Producer(); run Consumer() } }
