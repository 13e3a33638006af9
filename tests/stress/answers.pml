/* Batches asked for and answered, priorities sent back; learner and replay die at every step.
 *
 *   learner  -- requests -->  replay  -- answers -->  learner  -- updates -->  replay
 *
 * Request n is answered by answer n. The replay stores an answer's tail, then the request's head.
 *
 * Checked: no more batches are under way than the learner asks for ahead, whoever dies (so no ring
 * overflows); the learner always gets another one; the last priority that was sent is applied.
 *
 * spin -a answers.pml && cc -DSAFETY -o pan pan.c && ./pan         no errors
 * With a rule taken away (-D NO_...) the check must fail.
 */
#define PREFETCH 2
#define BATCHES 4       /* that the learner learns from */
#define CRASHES 2       /* of each */

/* Sequences: how many were ever committed and released. Contents need none: see ring.pml. */
byte requests_tail, requests_head, answers_tail, answers_head, updates_tail, updates_head;
byte learned;           /* ghost */
byte applied;           /* as the replay has it; update n sets it to n */

#define UNDER_WAY (requests_tail - requests_head + answers_tail - answers_head)
#define CRASH if :: crashes < CRASHES -> goto dead :: true fi

inline request() {
    requests_tail++;
    /* one more for an instant: between the two stores of an answer */
    assert(UNDER_WAY <= PREFETCH + 1)
}

proctype Learner() {
    byte ahead, crashes, seen;
born:
#ifdef NO_OWN_WORDS             /* counts by four words, two of which the replay moves */
    ahead = answers_tail;
    seen = requests_head;
    ahead = ahead - answers_head + requests_tail - seen;
#else
    ahead = requests_tail - answers_head;
#endif
    do
    :: ahead < PREFETCH -> request(); ahead++; CRASH
    :: else -> break
    od;
    ahead = 0; seen = 0;        /* fewer states */
    do
    :: learned == BATCHES -> break
    :: learned < BATCHES && answers_tail > answers_head ->
        CRASH;
        answers_head++;
        CRASH;
        learned++;
        updates_tail++;
        CRASH;
        request();
        CRASH
    od;
    goto end;
dead:
    crashes++;
    goto born;
end: skip
}

proctype Replay() {
    byte crashes;
end: do
    :: updates_tail > updates_head ->
#ifdef NO_APPLY_FIRST           /* released, then applied */
        updates_head++;
        CRASH;
        applied = updates_head
#else
        applied = updates_head + 1;
        CRASH;
        updates_head++
#endif
        CRASH
    :: requests_tail > requests_head ->
        answers_tail++;
        CRASH;
        requests_head++;
        CRASH
    od;
dead:
    crashes++;
#ifndef NO_PAIRING              /* what is answered is not asked for any more */
    if
    :: answers_tail > requests_head -> requests_head = answers_tail
    :: else
    fi;
#endif
    goto end
}

proctype Account() {
    timeout;                    /* nothing more can happen */
    assert(learned == BATCHES);
    assert(applied == updates_tail)
}

init { atomic { run Learner(); run Replay(); run Account() } }
