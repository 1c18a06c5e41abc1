/* Short TCP connections, as fast as one thread can: connect, one byte there, one back, close.
 *
 *   short serve ADDRESS PORT          until killed
 *   short dial ADDRESS PORT SECONDS   prints: connections, failures, seconds
 *
 * Written in C because a Python client costs more than the connection, and hides what differs.
 * The client closes with a reset, so that no TIME_WAIT fills up the ports. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

static int serve(struct sockaddr_in *at)
{
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(listener, (struct sockaddr *)at, sizeof *at) || listen(listener, 4096)) {
		perror("serve");
		return 1;
	}
	for (;;) {
		char byte;
		int s = accept(listener, NULL, NULL);

		if (s < 0)
			continue;
		if (read(s, &byte, 1) == 1 && write(s, &byte, 1) == 1) {
			/* the client ends it */
			if (read(s, &byte, 1) > 0)
				continue;
		}
		close(s);
	}
}

static int dial(struct sockaddr_in *to, double seconds)
{
	struct linger reset = {.l_onoff = 1};
	long done = 0, failed = 0;
	double start = now(), end = start + seconds;

	while (now() < end) {
		char byte = 'x';
		int s = socket(AF_INET, SOCK_STREAM, 0);

		if (connect(s, (struct sockaddr *)to, sizeof *to) || write(s, &byte, 1) != 1 ||
		    read(s, &byte, 1) != 1)
			failed++;
		else
			done++;
		setsockopt(s, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
		close(s);
	}
	printf("%ld %ld %f\n", done, failed, now() - start);
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = {.sin_family = AF_INET};

	signal(SIGPIPE, SIG_IGN);
	if (argc < 4 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
		return 2;
	at.sin_port = htons(atoi(argv[3]));
	if (!strcmp(argv[1], "serve"))
		return serve(&at);
	return argc > 4 ? dial(&at, atof(argv[4])) : 2;
}
