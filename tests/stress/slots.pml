/* Who owns a chunk slot: one actor, the replay and the learner; actor and replay die at every step.
 *
 *   free --grant--> granted --commit--> committed --accept--> live --evict--> evicted --> free
 *
 * Checked: a row that the learner takes for whole is whole and of its key; every committed chunk is
 * accepted once; no slot is lost (the actor always gets another grant, or the check finds it stuck;
 * once it is dead for good, nothing is left to it).
 *
 * spin -a slots.pml && cc -DSAFETY -o pan pan.c && ./pan         no errors
 * With a rule taken away (-D NO_...) the check must fail.
 */
#define SLOTS 2
#ifndef CHUNKS
#define CHUNKS 2       /* that the actor commits */
#endif
#define ANSWERS 1      /* that the learner asks for */
#define ACTOR_CRASHES 1
#define REPLAY_CRASHES 1
#define RING 4

#define FREE 0
#define GRANTED 1
#define COMMITTED 2
#define LIVE 3
#define EVICTED 4

/* Headers and bodies. The last store of every move is the one to `state`. */
byte state[SLOTS], generation[SLOTS], life_of[SLOTS], grant_sequence[SLOTS];
byte low[SLOTS], high[SLOTS];

/* The ring of grants; the commits need none here: what `state` says rules. */
byte ring_slot[RING], ring_life[RING], tail, head;

byte life = 1;          /* which life of the actor this is */
byte announced = 1;     /* the parent's word: this life runs; 0: it is dead for sure */
byte chunks;            /* committed so far; ghost */
byte accepts[CHUNKS];   /* ghost */

bool nobody_reads;      /* the parent's word: the learner is dead for sure */
bool answered;          /* one answer: a key, and (ghost) what its row holds */
byte key_slot, key_generation, key_value, answers;

#define VALUE (4 * chunks + life)
#define ACTOR_CRASH if :: life <= ACTOR_CRASHES -> goto dead :: true fi

proctype Actor() {
    byte s;
    bool mine;
born:
    s = 0; mine = false;
    do
    :: chunks == CHUNKS -> break
    :: chunks < CHUNKS ->
        tail > head;
        atomic {
            s = ring_slot[head % RING];
            mine = ring_life[head % RING] == life;
            ring_slot[head % RING] = 0; ring_life[head % RING] = 0;     /* fewer states */
            head++
        };
        if :: mine :: else -> goto born fi;     /* a former life's: the replay has it back */
        ACTOR_CRASH;
#ifdef NO_RELEASE_COMMIT        /* the state may be seen before the body */
        if
        :: atomic { state[s] = COMMITTED; chunks++ }; low[s] = VALUE - 4; high[s] = VALUE - 4;
           goto born
        :: true
        fi;
#endif
        low[s] = VALUE;
        ACTOR_CRASH;
        high[s] = VALUE;
        ACTOR_CRASH;
        atomic { state[s] = COMMITTED; chunks++ };      /* SYNC chunk-whole */
        ACTOR_CRASH
    od;
    goto end;
dead:
    announced = 0;              /* its pidfd has fired */
    if
    :: true                     /* for good, or for long */
    :: atomic { life++; announced = life }; goto born
    fi;
end: skip
}

/* The replay's moves of a slot: one shared store, then perhaps death. */
#define REPLAY_CRASH if :: crashes < REPLAY_CRASHES -> goto dead :: true fi
#define HAS_CREDIT(s) (state[s] == GRANTED && life_of[s] == known)
#define MAY_GRANT(s) (state[s] == FREE && known && !HAS_CREDIT(1 - s) && tail - head < RING)
#define MAY_FREE(s) (state[s] == EVICTED && (!answered || nobody_reads))  /* quarantine is over */
#define MAY_ANSWER(s) (state[s] == LIVE && !answered && answers < ANSWERS)
#ifdef NO_FIRST_LOOK            /* after attaching it hears of lives only when they change */
#define HEARD heard
#else
#define HEARD true
#endif
#define IS_LEFT(s) (state[s] == GRANTED && HEARD && known == announced && life_of[s] != known)

inline attach(s) {
    if
    :: state[s] == EVICTED -> state[s] = FREE
#ifndef NO_GRANT_CHECK
    :: state[s] == GRANTED && grant_sequence[s] >= tail -> state[s] = FREE      /* never sent */
#endif
    :: else
    fi
}

inline accept(s) {
    atomic {
        state[s] = LIVE;
        grant_sequence[s] = 0; life_of[s] = 0;  /* fewer states */
        accepts[low[s] / 4]++;
        assert(low[s] == high[s] && accepts[low[s] / 4] == 1)
    }
}

inline evict(s) {
#ifdef NO_GENERATION_FIRST
    state[s] = EVICTED;
    REPLAY_CRASH;
    generation[s]++
#else
    generation[s]++;            /* SYNC row-whole */
    REPLAY_CRASH;
    state[s] = EVICTED
#endif
}

inline grant(s) {
    atomic { life_of[s] = known; grant_sequence[s] = tail };
    state[s] = GRANTED;
    REPLAY_CRASH;
    atomic { ring_slot[tail % RING] = s; ring_life[tail % RING] = known; tail++ }
}

inline answer(s) {
    atomic {
        answered = true;
        answers++;
        key_slot = s;
        key_generation = generation[s];
        key_value = low[s]
    }
}

proctype Replay() {
    byte known, crashes;
    bool heard;
end: do
    :: atomic { known != announced -> known = announced; heard = true }
    :: IS_LEFT(0) -> state[0] = FREE; REPLAY_CRASH
    :: IS_LEFT(1) -> state[1] = FREE; REPLAY_CRASH
#ifdef NO_PIDFD                 /* a life that does not answer is taken for dead */
    :: known && state[0] == GRANTED -> state[0] = FREE
#endif
    :: state[0] == COMMITTED -> accept(0); REPLAY_CRASH
    :: state[1] == COMMITTED -> accept(1); REPLAY_CRASH
    :: state[0] == LIVE -> evict(0); REPLAY_CRASH
    :: state[1] == LIVE -> evict(1); REPLAY_CRASH
    :: MAY_FREE(0) -> state[0] = FREE; REPLAY_CRASH
    :: MAY_FREE(1) -> state[1] = FREE; REPLAY_CRASH
    :: MAY_GRANT(0) -> grant(0); REPLAY_CRASH
    :: MAY_GRANT(1) -> grant(1); REPLAY_CRASH
    :: MAY_ANSWER(0) -> answer(0); REPLAY_CRASH
    :: MAY_ANSWER(1) -> answer(1); REPLAY_CRASH
    od;
dead:
    crashes++;
    known = 0;
    heard = false;
    attach(0);
    attach(1);
    goto end
}

proctype Learner() {
    byte a, b, now;
    bool died;
end: do
    :: answered && !died -> died = true; nobody_reads = true; nobody_reads = false  /* reads anew */
    :: answered ->
#ifdef NO_ACQUIRE_FENCE         /* the generation may be read before the row */
        now = generation[key_slot];
#endif
        a = low[key_slot];
        b = high[key_slot];
#ifndef NO_ACQUIRE_FENCE
        now = generation[key_slot];
#endif
        if
#ifdef NO_RECHECK
        :: true -> assert(a == b && a == key_value)
#else
        :: now == key_generation -> assert(a == b && a == key_value)
#endif
        :: now != key_generation        /* torn: weight 0, key -1 */
        fi;
        atomic { answered = false; a = 0; b = 0; now = 0 }
    od
}

proctype Account() {
    byte i;
    timeout;                    /* nothing more can happen: nothing committed is missing */
    do
    :: i < chunks -> assert(accepts[i] == 1); i++
    :: else -> break
    od;
    assert(announced || (state[0] != GRANTED && state[1] != GRANTED))
}

init { atomic { run Actor(); run Replay(); run Learner(); run Account() } }
